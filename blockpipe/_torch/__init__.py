"""The private names of torch that Blockpipe uses, each under a public name.

Every such name is used here and nowhere else, with the reason why no public one serves. Its
arguments are torch's own objects. ``tests/_torch`` checks the behaviour that the package relies on,
so a new release of torch can break only these files and tests. Read ``graph`` first; ``modes`` is
about the modes around code, and each of the others about one kind of object.
"""
