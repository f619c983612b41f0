"""The API that clients call: what is asked, and what is answered."""
