package migrate

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// Cluster is what runs on a cluster, as far as a migration is concerned.
type Cluster struct {
	Nodes []*corev1.Node
	// KubeProxy and Fairlead are the DaemonSets of both programs, nil if there is none; Pods are kube-proxy's.
	KubeProxy  *appsv1.DaemonSet
	Fairlead   *appsv1.DaemonSet
	Pods       []*corev1.Pod
	ConfigMaps map[string]*corev1.ConfigMap
	Services   []*corev1.Service
}

// NodePlan is a node in a Plan.
type NodePlan struct {
	Name  string `json:"name"`
	Phase Phase  `json:"phase"`
	// Skipped is why the node is left as it is, empty if it is not.
	Skipped string `json:"skipped,omitempty"`
	// Failure is why the last step on the node failed.
	Failure string `json:"failure,omitempty"`
}

// Plan is what 'fairlead migrate plan' shows. Its JSON form is meant for programs: fields are only ever added.
type Plan struct {
	// KubeProxy describes the kube-proxy of the cluster.
	KubeProxy string     `json:"kubeProxy,omitempty"`
	Nodes     []NodePlan `json:"nodes,omitempty"`
	// Differs has what behaves differently, Refused what must be changed before apply works.
	Differs []string `json:"differs,omitempty"`
	Refused []string `json:"refused,omitempty"`

	settings *Settings
	mistakes []error
}

// Settings are kube-proxy's, nil if they were refused.
func (p *Plan) Settings() *Settings { return p.settings }

// Mistakes is an error if a name is of no Node, or the label of a Node is not a Phase. No command goes on then.
func (p *Plan) Mistakes() error { return errors.Join(p.mistakes...) }

// The answers for clusters whose kube-proxy is not a DaemonSet.
const noDaemonSet = "there is no DaemonSet kube-proxy in kube-system: a kube-proxy that the distribution starts itself (k3s, RKE2) " +
	"or an add-on manages is switched off there; docs/kubernetes.md has the way for these clusters"

// byHand is the answer where nodes have fairlead proxy without a Phase: no node has kube-proxy once its objects are removed.
const byHand = "the DaemonSet fairlead-proxy was not installed by 'fairlead migrate': it selects nodes without the label " + Label +
	"; docs/kubernetes.md, by hand, has the way back"

// Decide makes the plan for the nodes of some names, for all if names is empty.
func Decide(c *Cluster, names []string) *Plan {
	p := &Plan{}
	for _, name := range names {
		if !slices.ContainsFunc(c.Nodes, func(n *corev1.Node) bool { return n.Name == name }) {
			p.mistake(fmt.Errorf("there is no Node %s", name))
		}
	}
	if c.KubeProxy == nil {
		p.Refused = append(p.Refused, noDaemonSet)
		return p
	}
	p.decideNodes(c, names)
	if c.Fairlead != nil && !byPhase(c.Fairlead) {
		p.Refused = append(p.Refused, byHand)
		return p
	}
	s, err := ReadSettings(c.KubeProxy, c.ConfigMaps)
	if err != nil {
		p.refuse("%w", err)
		return p
	}
	p.settings = s
	p.KubeProxy = fmt.Sprintf("%s, mode %s", c.KubeProxy.Spec.Template.Spec.Containers[0].Image, s.Mode)
	if s.ConfigMap != "" {
		p.KubeProxy += ", configured by the ConfigMap " + s.ConfigMap
	}
	if s.EndsWithoutPort {
		p.refuse("kube-proxy has --bind-address-hard-fail (bindAddressHardFail of its file): while both programs run on a node, the one " +
			"without the ports of health checks and metrics would end again and again. Set it to false, start the Pods of kube-proxy again, " +
			"and run the command again")
	}
	p.decideMode(s)
	p.decideServices(c)
	if s.File != nil {
		p.Differs = append(p.Differs, s.File.Notes...)
		for _, l := range s.File.Lenient {
			p.differ("kube-proxy's file: %s: ignored, as by kube-proxy", l)
		}
	}
	return p
}

func (p *Plan) refuse(format string, args ...any) {
	p.Refused = append(p.Refused, fmt.Errorf(format, args...).Error())
}

func (p *Plan) mistake(err error) {
	p.mistakes = append(p.mistakes, err)
	p.Refused = append(p.Refused, err.Error())
}

func (p *Plan) differ(format string, args ...any) {
	p.Differs = append(p.Differs, fmt.Sprintf(format, args...))
}

// decideNodes chooses the nodes that are changed.
func (p *Plan) decideNodes(c *Cluster, names []string) {
	for _, n := range c.Nodes {
		phase, err := ParsePhase(n.Labels[Label])
		if err != nil {
			p.mistake(fmt.Errorf("on Node %s: %w", n.Name, err))
		}
		np := NodePlan{Name: n.Name, Phase: phase, Failure: n.Annotations[Failure]}
		switch {
		case len(names) > 0 && !slices.Contains(names, n.Name):
			np.Skipped = "not among --nodes"
		case n.Labels[corev1.LabelOSStable] == "windows":
			np.Skipped = "it runs Windows"
		case phase == Before && !runs(c.Pods, n.Name):
			np.Skipped = "kube-proxy does not run there"
		case !Ready(n):
			p.refuse("Node %s is not ready: repair it, or name the other nodes with --nodes", n.Name)
		}
		p.Nodes = append(p.Nodes, np)
	}
	slices.SortFunc(p.Nodes, func(a, b NodePlan) int { return strings.Compare(a.Name, b.Name) })
	if !slices.ContainsFunc(p.Nodes, func(n NodePlan) bool { return n.Skipped == "" }) {
		p.refuse("no node is left to change")
	}
}

// runs reports whether a Pod is on a node.
func runs(pods []*corev1.Pod, node string) bool {
	return slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == node })
}

// Ready reports whether a Node is ready.
func Ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// decideMode lists what mode nft does differently from kube-proxy's mode.
func (p *Plan) decideMode(s *Settings) {
	switch s.Mode {
	case kubeproxyconfig.ModeNFTables:
		p.differ("the rules are in nf_tables, as now, in the tables of fairlead in place of kube-proxy's")
	case kubeproxyconfig.ModeIPTables:
		p.differ("the rules are in nf_tables, not in iptables: 'nft list ruleset' shows them, 'iptables-save' does not")
		if !s.has("nodeport-addresses") {
			p.differ("node ports answer on 127.0.0.1 only if net.ipv4.conf.all.route_localnet of the machine is 1: " +
				"kube-proxy has set it, but it is not set after the next start of the machine")
		}
	case kubeproxyconfig.ModeIPVS:
		p.differ("the rules are in nf_tables, not in IPVS: 'nft list ruleset' shows them, 'ipvsadm' does not; endpoints are chosen at random")
		p.differ("connections that go through IPVS end with its rules: a node keeps them, and the phase switched, until the connections have " +
			"ended. 'fairlead migrate apply' again removes the rules then, or at once with --end-connections. 'kube-proxy --cleanup', which " +
			"removes them, removes all virtual servers of the machine, also the ones of other programs")
	}
	for _, flag := range []string{"iptables-min-sync-period", "iptables-sync-period"} {
		if s.has(flag) {
			p.differ("--%s of kube-proxy counts for mode nft, too", flag)
		}
	}
	p.differ("the Pods of kube-proxy are replaced once, since their DaemonSet gets an affinity to nodes; its rules stay in place")
	p.differ("when the addresses or podCIDRs of a Node change, the proxy adapts; kube-proxy ends")
}

// decideServices lists what differs for the Services of the cluster.
func (p *Plan) decideServices(c *Cluster) {
	sticky := 0
	for _, s := range c.Services {
		if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
			sticky++
		}
	}
	switch {
	case sticky == 0:
	case p.settings != nil && p.settings.Drains():
		p.differ("Services with session affinity (%d): a client may get another endpoint once, with its first new connection "+
			"after the change", sticky)
	default:
		p.differ("Services with session affinity (%d): clients keep their endpoint; only one that connects for the first time in the "+
			"seconds of the change may get another one", sticky)
	}
}
