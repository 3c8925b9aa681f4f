"""What torch keeps to itself and Blockpipe needs, behind one wall.

Every private name of torch that the package uses is used here, once, under a public name that says
what it is for, with the reason why no public way serves. Nothing comes in but torch's own objects.
``tests/_torch`` holds torch to what is relied on: a new release breaks these files and tests
alone. Read `graph.py` first; `modes.py` is what is around code, the others are about one object.
"""
