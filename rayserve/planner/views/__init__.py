"""How do people see a plan? On one screen of a terminal, and as one page of HTML."""
