"""Models and helpers of several test files."""

count, numbers = 0, [0]


def refusing(base):
    """A container whose methods refuse."""

    class Refuses(base):
        def clear(self):
            raise TypeError("refused")

        extend = update = append = clear

    return Refuses
