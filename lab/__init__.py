"""What writes the records, tables and pictures of this repository; see README.md beside this file."""
