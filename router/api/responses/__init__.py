"""POST /v1/responses, and the stored responses that later requests continue."""
