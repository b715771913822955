"""What is done with domain weights once they are learned: shown, averaged, bounded."""
