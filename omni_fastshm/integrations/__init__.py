"""Hosts that run on omni_fastshm: the only modules that know one, and the only ones that turn errors into its answers.

Nothing here is imported by the rest of the package, and a host is imported only where it is installed.
"""
