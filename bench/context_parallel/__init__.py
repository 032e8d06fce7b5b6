"""Context-parallel decode on several GPUs of one host: efficiency against one, and what more of them would give."""
