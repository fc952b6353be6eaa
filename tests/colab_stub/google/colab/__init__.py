"""What a chapter may import from `google.colab`, so that the book's run can see that it does. Nothing here does anything."""
from . import drive, files, output
