package engine

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Dist is a distribution of durations, given by points of its quantile function with
// linear interpolation. The zero Dist is always 0.
type Dist struct{ points []Point }

// Point says that a fraction At of all values is at most Value.
type Point struct {
	At    float64
	Value time.Duration
}

// maxValue keeps sums far from overflow.
const maxValue = time.Hour

// NewDist returns the distribution through points. The points begin at fraction 0, end at
// 1, and ascend in At. Values do not descend, and are between 0 and an hour. A single
// point is a constant.
func NewDist(points []Point) (Dist, error) {
	if len(points) == 0 {
		return Dist{}, fmt.Errorf("no points")
	}
	for i, p := range points {
		switch {
		case math.IsNaN(p.At) || p.At < 0 || p.At > 1:
			return Dist{}, fmt.Errorf("point %d: fraction %v is not in 0 to 1", i, p.At)
		case p.Value < 0 || p.Value > maxValue:
			return Dist{}, fmt.Errorf("point %d: %v is not in 0 to %v", i, p.Value, maxValue)
		case i > 0 && p.At <= points[i-1].At:
			return Dist{}, fmt.Errorf("point %d: fraction %v does not follow %v", i, p.At, points[i-1].At)
		case i > 0 && p.Value < points[i-1].Value:
			return Dist{}, fmt.Errorf("point %d: %v is less than %v before", i, p.Value, points[i-1].Value)
		}
	}
	if n := len(points); n > 1 && (points[0].At != 0 || points[n-1].At != 1) {
		return Dist{}, fmt.Errorf("fractions %v to %v: want 0 to 1", points[0].At, points[n-1].At)
	}
	return Dist{append([]Point(nil), points...)}, nil
}

// Draw returns a random value. A constant does not use rng.
func (d Dist) Draw(rng *rand.Rand) time.Duration {
	switch len(d.points) {
	case 0:
		return 0
	case 1:
		return d.points[0].Value
	}
	return d.at(rng.Float64())
}

// at is the quantile function. Requires: at least two points.
func (d Dist) at(u float64) time.Duration {
	// Search from the start: the tail has most of the points but little probability.
	i := 1
	for i < len(d.points)-1 && u > d.points[i].At {
		i++
	}
	a, b := d.points[i-1], d.points[i]
	part := (u - a.At) / (b.At - a.At)
	return a.Value + time.Duration(part*float64(b.Value-a.Value))
}
