"""Transport of bytes to other ranks: torch.distributed, or memory that the ranks of a host share. Knows no bucket."""
