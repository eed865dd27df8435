package ledger

// Checks of the inside, for tests from the outside.
func (l *Ledger) CheckInvariants() error { return l.checkInvariants() }
func (l *Ledger) CheckForm() error       { return l.checkForm() }
