"""What `maskfleet bench` measures: speed and roofline."""
