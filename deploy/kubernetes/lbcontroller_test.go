package kubernetes

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// With the controller of load balancers in a Deployment, it gives out the addresses, the nodes announce them, and each account has only
// the rights that its requests need: a node's may not write Services, addresses and pools.
func TestLBController(t *testing.T) {
	r := newRig(t)
	r.kubectl("apply", "-f", "controllers.yaml", "-f", "lb.yaml")
	r.kubectl("apply", "-f", "lb-controller.yaml") // over the other manifest, too
	r.register(r.node)
	deployments, err1 := r.client.AppsV1().Deployments("kube-system").List(t.Context(), metav1.ListOptions{})
	daemon, err2 := r.client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "fairlead-lb", metav1.GetOptions{})
	if err1 != nil || err2 != nil || len(deployments.Items) != 2 {
		t.Fatal(len(deployments.Items), err1, err2)
	}
	for _, d := range deployments.Items {
		r.run(r.node, d.Spec.Template)
	}
	r.run(r.node, daemon.Spec.Template)
	r.createService()
	r.checkEndpoints()
	r.checkAddress()
	r.checkFronts()
	r.checkRemoval()
	r.checkRights()
	for _, account := range []string{"fairlead-lb", "fairlead-lb-controller"} {
		r.checkUnusedBut(account, apart[account])
	}
}

// apart are rights that TestLBController does not need, as unasked has the ones of others.
var apart = map[string]map[string][]string{
	"fairlead-lb": {
		"nodes that come and go": {
			"get nodes", "create leases.coordination.k8s.io",
			"list leases.coordination.k8s.io fairlead-lb-witness",
			"watch leases.coordination.k8s.io fairlead-lb-witness", "get leases.coordination.k8s.io fairlead-lb-witness",
			"update leases.coordination.k8s.io fairlead-lb-witness",
		},
		"passwords of BGP":      {"list secrets fairlead-lb", "watch secrets fairlead-lb"},
		"what cannot be served": {"create events", "patch events"},
	},
	"fairlead-lb-controller": {
		"--lb-pool": {
			"create ipaddresspools.fairlead.dev", "update ipaddresspools.fairlead.dev", "delete ipaddresspools.fairlead.dev",
		},
		"nodes that come and go":        {"delete speakers.fairlead.dev", "update configmaps fairlead-lb-voters", "get nodes"},
		"an address that changes hands": {"get ipaddresses.networking.k8s.io", "update ipaddresses.networking.k8s.io"},
		"an Event that comes again":     {"patch events"},
		"clusters that check owners' rights": {
			"update backendtlspolicies/finalizers.gateway.networking.k8s.io", "update gateways/finalizers.gateway.networking.k8s.io",
			"update listenersets/finalizers.gateway.networking.k8s.io", "update referencegrants/finalizers.gateway.networking.k8s.io",
		},
		"definitions of an older version": olderDefinitions(),
	},
}
