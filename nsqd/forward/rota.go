package forward

// rota divides the RDY of a relayed subscription among the brokers of its topic. If RDY is less
// than one message for each broker, some brokers have no credit, and the credit moves from broker
// to broker. The zero value is ready.
type rota struct {
	turn      int // index of the first broker with credit, or with a part of the remainder
	stayed    int // passes since the credit last moved
	fruitless int // consecutive passes without a message from any broker
}

const (
	// maxStay is the number of passes for which a broker keeps its credit while other brokers have
	// none.
	maxStay = 8
	// maxPause is the longest pause between two passes without messages, in pauses.
	maxPause = 4
)

// divide returns each broker's part of ready. held is the number of messages of each broker that
// the consumer holds. The parts add up to ready if there is at least one message for each broker.
// Otherwise a broker only gets credit for another message if the consumer's total leaves room.
func (r *rota) divide(ready int, held []int) []int {
	brokers := len(held)
	parts := make([]int, brokers)
	if ready >= brokers {
		for i := range brokers {
			parts[(r.turn+i)%brokers] = ready / brokers
			if i < ready%brokers {
				parts[(r.turn+i)%brokers]++
			}
		}
		return parts
	}
	room := ready
	for _, n := range held {
		room -= n
	}
	for i := range ready {
		switch of := (r.turn + i) % brokers; {
		case held[of] > 0: // the credit is in use
			parts[of] = 1
		case room > 0:
			parts[of] = 1
			room--
		}
	}
	return parts
}

// scarce reports whether some brokers have no credit.
func scarce(ready, brokers int) bool { return 0 < ready && ready < brokers }

// pass moves the credit to the next broker if the first broker with credit delivers nothing, or has
// had the credit for maxStay passes. came is the number of messages of each broker since the last
// pass. pass returns the length of the next pause, in pauses. Requires: RDY is scarce.
func (r *rota) pass(came []int) (pauses int) {
	brokers := len(came)
	first := r.turn % brokers
	r.fruitless++
	for _, n := range came {
		if n > 0 {
			r.fruitless = 0
		}
	}
	if r.stayed++; came[first] == 0 || r.stayed >= maxStay {
		r.turn, r.stayed = (first+1)%brokers, 0
	}
	return min(1+r.fruitless/brokers, maxPause)
}
