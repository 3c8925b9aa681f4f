"""Watch what a forward changes outside of the model: the user's objects, and tensors of nobody's.

In: the holders of all objects within reach of the model, and the operations. Out: entries
:class:`SharedChange` of the recording. Read first: ``outside_state``, which looks at the objects;
``compared_members`` says what of them is compared. ``outside_tensors`` has the tensors that no
module registered.
"""
