package sched

import (
	"regexp"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// wakePause is the least time between two looks at which waiting Pods may fit now.
const wakePause = 100 * time.Millisecond

// wakes is what has happened since waiting Pods were looked at last.
type wakes struct {
	nodes   map[string]bool // nodes that may have room
	all     bool            // every waiting Pod may fit now
	pending bool
	last    time.Time
}

// concernsOthers reports whether a Pod has rules about other Pods.
func concernsOthers(s *corev1.PodSpec) bool {
	a := s.Affinity
	return a != nil && (a.PodAffinity != nil || a.PodAntiAffinity != nil) || len(s.TopologySpreadConstraints) > 0
}

// wakeSoon has waiting Pods looked at, not more often than each wakePause: Pods with rules about
// other Pods, and Pods that node has room for, if it is not "", or all. It is called with mu held.
func (c *scheduler) wakeSoon(node string, all bool) {
	w := &c.wakes
	if len(c.waiting) == 0 {
		return
	}
	if w.nodes == nil {
		w.nodes = map[string]bool{}
	}
	if node != "" {
		w.nodes[node] = true
	}
	w.all = w.all || all
	if w.pending {
		return
	}
	w.pending = true
	time.AfterFunc(max(0, wakePause-time.Since(w.last)), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, name := range c.woken() {
			c.loop.Queue.Add(name)
		}
		c.wakes = wakes{last: time.Now()}
	})
}

// woken returns the waiting Pods that may fit after what has happened. It is called with mu held.
func (c *scheduler) woken() (out []svc.Name) {
	for name, w := range c.waiting {
		if c.wakes.all || w.others || c.hasRoom(w.pod) {
			out = append(out, name)
		}
	}
	return out
}

// hasRoom reports whether one of the nodes with more room could take a Pod.
func (c *scheduler) hasRoom(pod *corev1.Pod) bool {
	ports := hostPorts(pod)
	for node := range c.wakes.nodes {
		if c.cluster.MayTake(pod, node, func(n string) bool { return c.ports.free(n, ports) }) {
			return true
		}
	}
	return false
}

var nodeCounts = regexp.MustCompile(`(^0/|: |, )[0-9]+ `)

// withoutCounts returns why a Pod fits on no Node, without the numbers of nodes.
func withoutCounts(why string) string { return nodeCounts.ReplaceAllString(why, "$1") }
