"""What all tests share."""

from hypothesis import settings

# The machines that run these tests are shared: how long an example takes says nothing of the code.
settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")
