"""busync beside what people use today, on the same work, in one run: ``make bench``. See README.md."""
