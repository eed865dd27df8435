package forward

// rota divides the RDY of a relayed subscription among the brokers of its topic. If RDY is less
// than one message for each broker, some brokers have no credit, and the credit moves from broker
// to broker. The zero value is ready.
type rota struct {
	first     int // index of the first broker with credit, or with a part of the remainder
	passes    int // passes since the credit last moved
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
			parts[(r.first+i)%brokers] = ready / brokers
			if i < ready%brokers {
				parts[(r.first+i)%brokers]++
			}
		}
		return parts
	}
	room := ready
	for _, n := range held {
		room -= n
	}
	for i := range ready {
		switch broker := (r.first + i) % brokers; {
		case held[broker] > 0: // the credit is in use
			parts[broker] = 1
		case room > 0:
			parts[broker] = 1
			room--
		}
	}
	return parts
}

// scarce reports whether some brokers have no credit.
func scarce(ready, brokers int) bool { return 0 < ready && ready < brokers }

// pass moves the credit to the next broker if the first broker with credit delivers nothing, or has
// had the credit for maxStay passes. received is the number of messages of each broker since the last
// pass. pass returns the length of the next pause, in pauses. Requires: RDY is scarce.
func (r *rota) pass(received []int) (pauses int) {
	brokers := len(received)
	holder := r.first % brokers
	r.fruitless++
	for _, n := range received {
		if n > 0 {
			r.fruitless = 0
		}
	}
	if r.passes++; received[holder] == 0 || r.passes >= maxStay {
		r.first, r.passes = (holder+1)%brokers, 0
	}
	return min(1+r.fruitless/brokers, maxPause)
}
