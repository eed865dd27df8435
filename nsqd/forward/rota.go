package forward

// rota divides the RDY of a relayed subscription among the brokers of its topic. While the
// consumer asks for less than one message for each broker, some brokers have no credit, and
// the credit moves from broker to broker. The zero value is ready.
type rota struct {
	turn      int // the first broker with credit, or with a remainder's
	stayed    int // passes in which the credit stayed with a broker that delivered
	fruitless int // passes in a row without a message of any broker
}

const (
	// maxStay is for how many passes a broker keeps its credit while others have none.
	maxStay = 8
	// maxPause is how many times longer a pause between two passes is if nothing comes.
	maxPause = 4
)

// divide returns each broker's part of ready. held is how many messages of each broker the
// consumer holds. The parts add up to ready, unless there are more brokers than that. Then a
// broker gets credit for another message only if all that the consumer holds leaves room for it.
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
		case held[of] > 0: // the credit is used
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

// pass moves the credit to the next broker if the one that has it longest delivers nothing, or
// has had its time. came is how many messages of each broker came since the last pass. It
// returns how many pauses long the next pause is. Requires: RDY is scarce.
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
