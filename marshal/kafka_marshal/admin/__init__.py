"""Operations of admins: format the topic, pause groups, set positions, ..."""
