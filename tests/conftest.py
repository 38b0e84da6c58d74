"""One BLAS thread: matrices here are small, and threads without work spin beside the others."""

import numpy as np  # noqa: F401  its BLAS must be loaded to be limited
import scipy.linalg  # noqa: F401
from threadpoolctl import threadpool_limits

threadpool_limits(1)
