"""Calibration: expert counts in, routing artifact (IDF, layer mask, centroids) out."""
