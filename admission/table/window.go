package table

// WindowSize is the number of answers kept for each session.
const WindowSize = 4096

// Window keeps the last answers to an asker, so that a question that is sent again gets the same answer
// and is charged once. Question numbers grow by one. The zero Window is a new session's. Not safe for
// concurrent use.
//
// Invariants: a number that was begun is in its slot, or is at most newest-WindowSize; a window of
// fewer than WindowSize slots has never overwritten a number.
type Window[A any] struct {
	newest uint64
	slots  []windowSlot[A]
}

type windowSlot[A any] struct {
	number uint64
	stands Standing // Fresh: the slot is free
	answer A
}

// Standing is the state of a question in a Window.
type Standing uint8

const (
	// Fresh: not seen before; the caller decides the question and calls End or Cancel.
	Fresh Standing = iota
	// Pending: seen before, and being decided.
	Pending
	// Answered: seen before, and answered.
	Answered
	// Old: sent so long ago that the answer is no longer kept.
	Old
)

// Begin returns the state of a question, and its answer if it is Answered. A Fresh question becomes
// Pending.
func (w *Window[A]) Begin(number uint64) (Standing, A) {
	var none A
	if w.newest >= WindowSize && number <= w.newest-WindowSize {
		return Old, none
	}
	// Start small: most askers have few questions at a time.
	for n := len(w.slots); n < WindowSize && (n == 0 || w.slotOf(number).taken(number)); n = len(w.slots) {
		w.grow()
	}
	s := w.slotOf(number)
	if s.stands != Fresh && s.number == number {
		return s.stands, s.answer
	}
	*s = windowSlot[A]{number: number, stands: Pending}
	w.newest = max(w.newest, number)
	return Fresh, none
}

// End keeps the answer to a Pending question. For any other question End returns false.
func (w *Window[A]) End(number uint64, a A) bool {
	s := w.slotOf(number)
	if s.number != number || s.stands != Pending {
		return false
	}
	s.stands, s.answer = Answered, a
	return true
}

// Replace sets the answer to a question that was begun, and overwrites an earlier answer.
func (w *Window[A]) Replace(number uint64, a A) {
	if s := w.slotOf(number); s.number == number && s.stands != Fresh {
		s.stands, s.answer = Answered, a
	}
}

// Cancel forgets a Pending question, which was not decided. If it is sent again, it is Fresh.
func (w *Window[A]) Cancel(number uint64) {
	if s := w.slotOf(number); s.number == number && s.stands == Pending {
		s.stands = Fresh
	}
}

func (w *Window[A]) slotOf(number uint64) *windowSlot[A] {
	return &w.slots[number&uint64(len(w.slots)-1)] // len is a power of two
}

// taken reports whether the slot holds another number.
func (s *windowSlot[A]) taken(number uint64) bool {
	return s.stands != Fresh && s.number != number
}

func (w *Window[A]) grow() {
	old := w.slots
	w.slots = make([]windowSlot[A], min(WindowSize, max(64, 4*len(old))))
	for _, s := range old {
		if s.stands != Fresh {
			*w.slotOf(s.number) = s
		}
	}
}
