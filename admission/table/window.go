package table

// WindowSize is how many of a session's last answers are kept.
const WindowSize = 4096

// Window keeps the last answers that an asker was given, so that a question that it
// sends again is answered as before, and charged once. Numbers grow by one; the zero
// Window is that of a new session. Not safe for concurrent use.
//
// Invariants: a number that was begun is in its slot, or at most newest-WindowSize;
// a window of fewer slots has never overwritten one.
type Window[A any] struct {
	newest uint64
	slots  []windowSlot[A]
}

type windowSlot[A any] struct {
	number uint64
	stands Standing // Fresh: the slot is free
	answer A
}

// Standing is what a Window knows of a question.
type Standing uint8

const (
	// Fresh: to be decided; the window expects an End or a Cancel.
	Fresh Standing = iota
	// Pending: sent before, and being decided.
	Pending
	// Answered: sent before, and answered.
	Answered
	// Old: sent so long ago that its answer is not kept any more.
	Old
)

// Begin says where a question stands, and the answer if it had one.
func (w *Window[A]) Begin(number uint64) (Standing, A) {
	var none A
	if w.newest >= WindowSize && number <= w.newest-WindowSize {
		return Old, none
	}
	// A window begins small, since most askers ask little at a time.
	for n := len(w.slots); n < WindowSize && (n == 0 || w.at(number).taken(number)); n = len(w.slots) {
		w.grow()
	}
	s := w.at(number)
	if s.stands != Fresh && s.number == number {
		return s.stands, s.answer
	}
	*s = windowSlot[A]{number: number, stands: Pending}
	w.newest = max(w.newest, number)
	return Fresh, none
}

// End keeps the answer to a question that is Pending. It reports false for any other.
func (w *Window[A]) End(number uint64, a A) bool {
	s := w.at(number)
	if s.number != number || s.stands != Pending {
		return false
	}
	s.stands, s.answer = Answered, a
	return true
}

// Replace keeps an answer to a question that was begun, in place of any that it had.
func (w *Window[A]) Replace(number uint64, a A) {
	if s := w.at(number); s.number == number && s.stands != Fresh {
		s.stands, s.answer = Answered, a
	}
}

// Cancel forgets a question that was Fresh and was not decided: sent again, it is new.
func (w *Window[A]) Cancel(number uint64) {
	if s := w.at(number); s.number == number && s.stands == Pending {
		s.stands = Fresh
	}
}

func (w *Window[A]) at(number uint64) *windowSlot[A] {
	return &w.slots[number&uint64(len(w.slots)-1)] // a power of two
}

// taken reports whether the slot has another number.
func (s *windowSlot[A]) taken(number uint64) bool {
	return s.stands != Fresh && s.number != number
}

func (w *Window[A]) grow() {
	old := w.slots
	w.slots = make([]windowSlot[A], min(WindowSize, max(64, 4*len(old))))
	for _, s := range old {
		if s.stands != Fresh {
			*w.at(s.number) = s
		}
	}
}
