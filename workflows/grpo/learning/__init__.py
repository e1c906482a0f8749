"""Problems, settings, warm-up, the learner and evaluation."""
