package controller

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"
)

// maxVersionSkew is by how many minor versions a node's agent may differ from the server (docs/install.md, "Upgrade").
const maxVersionSkew = 1

// skewed reports whether an agent's version is too far from the server's, with a message for administrators. It is not
// of builds without a version.
func skewed(server, agent string) (message string, skew bool) {
	s, err1 := version.ParseGeneric(server)
	a, err2 := version.ParseGeneric(agent)
	if err1 != nil || err2 != nil {
		return "", false
	}
	apart := int64(s.Minor()) - int64(a.Minor())
	if s.Major() == a.Major() && max(apart, -apart) <= maxVersionSkew {
		return "", false
	}
	first := "the agent"
	if s.LessThan(a) {
		first = "the server"
	}
	return fmt.Sprintf("the agent is %s, the server %s: not tested together, at most %d minor version apart is; upgrade %s",
		agent, server, maxVersionSkew, first), true
}

// versionOf warns once of each version of a Node's agent that is too far from the server's.
func (c *nodeLifecycle) versionOf(n *corev1.Node) {
	agent := n.Status.NodeInfo.KubeletVersion
	c.mu.Lock()
	p := c.heartbeatLocked(n.Name)
	same := p.version == agent
	p.version = agent
	c.mu.Unlock()
	if same {
		return
	}
	if message, skew := skewed(c.options.Version, agent); skew {
		c.log.Warn("a node's version is too far from the server's", "node", n.Name, "version", agent, "server", c.options.Version)
		c.events.Event(n, corev1.EventTypeWarning, "VersionSkew", message)
	}
}
