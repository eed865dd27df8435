package web_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/tools/sim/web"
)

// The test checks the result of the paper's figure 7 for each scheduler.
func TestSite(t *testing.T) {
	g := NewWithT(t)
	total := map[string]float64{}
	for _, way := range web.Schedulings() {
		v := web.Visits{Scheduling: way, Times: .4, Warmup: 10, Seconds: 15, Seed: 7}
		classes, err := web.RunSite(v)
		g.Expect(err).NotTo(HaveOccurred())
		if way.Mode == 0 {
			again, err := web.RunSite(v)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(again).To(Equal(classes))
		}
		for k := range web.Resources() {
			of := func(class int) float64 { return classes[class].Busy[k] }
			g.Expect(of(0)+of(1)+of(2)).To(BeNumerically("<", 1.01), "a resource does not more than there is time")
			switch way.Name {
			case "nQoS", "literal":
				g.Expect(of(0)/of(2)).To(BeNumerically("~", 1, .1), way.Name)
			case "mQoS":
				g.Expect(of(0)/of(1)).To(BeNumerically("~", 2, .2), web.Resources()[k])
				g.Expect(of(0)/of(2)).To(BeNumerically("~", 6, .6), web.Resources()[k])
				g.Expect(of(0)+of(1)+of(2)).To(BeNumerically(">", .97), web.Resources()[k])
			case "sQoS":
				g.Expect(of(0)+of(1)+of(2) > .95).To(Equal(k == 0), web.Resources()[k])
			}
		}
		for _, c := range classes {
			total[way.Name] += c.Total()
		}
	}
	g.Expect(total["mQoS"] / total["sQoS"]).To(BeNumerically(">", 1.1))
}
