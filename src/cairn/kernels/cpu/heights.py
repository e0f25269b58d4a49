"""How many rows oneDNN's products have."""


def height_of(rows: int) -> int:
    """Of the product that so many rows are part of: one of a few, at most a sixteenth more than wanted from 64 rows on.

    oneDNN makes code for every shape that it meets, and keeps it: that takes time in the middle of serving, and memory
    for as many as were met.
    """
    if rows <= 16:
        return rows
    step = 8 if rows <= 64 else 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step
