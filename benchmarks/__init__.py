"""What the library costs, measured against what it replaces; see README.md beside this file."""
