package nodes

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

// checkVersion warns once of each version of a Node's agent that is too far from the server's.
func (c *lifecycle) checkVersion(n *corev1.Node) {
	agent := n.Status.NodeInfo.KubeletVersion
	if !c.live.setVersion(n.Name, agent) {
		return
	}
	server := c.options.Version
	if message, skew := skewed(server, agent); skew {
		c.Log.Warn("a node's version is too far from the server's", "node", n.Name, "version", agent, "server", server)
		c.Events.Event(n, corev1.EventTypeWarning, "VersionSkew", message)
	}
}
