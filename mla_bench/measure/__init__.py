"""What a compile says of a case: memory, and the compiler's words where it gave up."""
