package ledger

// Checks of internal state, for external tests.
func (l *Ledger) CheckInvariants() error { return l.checkInvariants() }
func (l *Ledger) CheckForm() error       { return l.checkForm() }

// Outstanding returns the grants that the broker has not acknowledged.
func (l *Ledger) Outstanding(id string) []Grant {
	var grants []Grant
	for _, t := range l.memberships.topicsOf(id) {
		if m := t.member(id); m.pending.Epoch != 0 {
			grants = append(grants, m.pending)
		}
	}
	return grants
}
