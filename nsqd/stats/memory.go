package stats

import (
	"runtime"
	"slices"
)

// Memory holds the Go runtime's memory statistics under NSQ's names. GC pauses are percentiles of
// the last 256 garbage collections, in microseconds.
type Memory struct {
	HeapObjects       uint64 `json:"heap_objects"`
	HeapIdleBytes     uint64 `json:"heap_idle_bytes"`
	HeapInUseBytes    uint64 `json:"heap_in_use_bytes"`
	HeapReleasedBytes uint64 `json:"heap_released_bytes"`
	GCPauseUsec100    uint64 `json:"gc_pause_usec_100"`
	GCPauseUsec99     uint64 `json:"gc_pause_usec_99"`
	GCPauseUsec95     uint64 `json:"gc_pause_usec_95"`
	NextGCBytes       uint64 `json:"next_gc_bytes"`
	GCTotalRuns       uint32 `json:"gc_total_runs"`
}

// Level is one statistic with its JSON name.
type Level struct {
	Name  string
	Value uint64
}

// Levels returns all statistics except GCTotalRuns, in NSQ's order.
func (m *Memory) Levels() []Level {
	return []Level{
		{"heap_objects", m.HeapObjects},
		{"heap_idle_bytes", m.HeapIdleBytes},
		{"heap_in_use_bytes", m.HeapInUseBytes},
		{"heap_released_bytes", m.HeapReleasedBytes},
		{"gc_pause_usec_100", m.GCPauseUsec100},
		{"gc_pause_usec_99", m.GCPauseUsec99},
		{"gc_pause_usec_95", m.GCPauseUsec95},
		{"next_gc_bytes", m.NextGCBytes},
	}
}

// ReadMemory returns the current statistics. It stops the process for some tens of microseconds:
// call it for people and for a push a minute.
func ReadMemory() Memory {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return memoryOf(&m)
}

func memoryOf(m *runtime.MemStats) Memory {
	pauses := slices.Clone(m.PauseNs[:min(int(m.NumGC), len(m.PauseNs))])
	slices.Sort(pauses)
	return Memory{
		HeapObjects:       m.HeapObjects,
		HeapIdleBytes:     m.HeapIdle,
		HeapInUseBytes:    m.HeapInuse,
		HeapReleasedBytes: m.HeapReleased,
		GCPauseUsec100:    percentile(pauses, 100) / 1000,
		GCPauseUsec99:     percentile(pauses, 99) / 1000,
		GCPauseUsec95:     percentile(pauses, 95) / 1000,
		NextGCBytes:       m.NextGC,
		GCTotalRuns:       m.NumGC,
	}
}

// percentile returns the smallest value that percent per cent of the sorted values do not exceed;
// 0 without values.
func percentile(sorted []uint64, percent int) uint64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := (len(sorted)*percent + 99) / 100
	return sorted[max(rank, 1)-1]
}
