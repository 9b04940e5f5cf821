"""Distributions, verification rules, exact enumeration and random streams: functions of tensors that know no model."""
