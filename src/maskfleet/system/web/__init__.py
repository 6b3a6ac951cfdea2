"""Files from web servers, by HTTPS, in ranges that resume after a break."""
