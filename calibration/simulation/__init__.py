"""A whole deployment on virtual time, with the routing objects of the live service."""
