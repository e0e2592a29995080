"""Building blocks of the decoder; with runner and sample the only users of kernels."""
