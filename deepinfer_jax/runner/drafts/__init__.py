"""Drafts on the device: proposed, verified in the step, committed. Part of runner."""
