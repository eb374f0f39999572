"""Collectives of a tensor parallel group. A group is an object handed down; torch's global group is never used."""
