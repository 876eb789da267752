"""What plans cost on an NVIDIA GPU: what is measured for it, and the search of the fastest forms of kernels."""
