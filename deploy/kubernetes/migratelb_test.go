package kubernetes

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// metallbDefinition defines one of MetalLB's kinds, without a schema.
const metallbDefinition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.metallb.io}
spec:
  group: metallb.io
  scope: Namespaced
  names: {plural: PLURAL, kind: KIND}
  versions:
  - name: VERSION
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---`

const metallbAccount = `
apiVersion: v1
kind: Namespace
metadata: {name: metallb-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: metallb, namespace: metallb-system}
---`

// metallbPrograms have the names and labels of MetalLB's manifest.
func metallbPrograms() string {
	const namespace, labels = "metallb-system", "app: metallb, component: "
	return metallbAccount + placeholder("Deployment", namespace, "controller", labels+"controller", "serviceAccountName: metallb") + "---" +
		placeholder("DaemonSet", namespace, "speaker", labels+"speaker",
			"serviceAccountName: metallb, hostNetwork: true, nodeSelector: {kubernetes.io/os: linux}")
}

// metallb changes the cluster from MetalLB to fairlead lb with the commands of docs/loadbalancer.md. MetalLB's objects and the
// address that its controller has given are real; its speaker, which would announce it until then, does not run here.
func (m *migration) metallb() {
	m.Helper()
	m.startMetalLB()
	plan, err := m.migrate("plan", "--component", "lb")
	if err != nil || !strings.Contains(plan, "DaemonSet metallb-system/speaker") ||
		!strings.Contains(plan, "addresses of Services that are taken over: 1") {
		m.Errorf("the plan is %v\n%s", err, plan)
	}
	out, err := m.migrate("apply", "--component", "lb")
	if err == nil || !strings.Contains(err.Error()+out, "docs/loadbalancer.md has the steps") {
		m.Errorf("apply: %v\n%s", err, out)
	}
	steps := blocks(section(m.T, "loadbalancer.md", "From MetalLB"))
	if len(steps) != 2 {
		m.Fatalf("the section has the commands %q", steps)
	}
	m.shell(steps...)
	if left := m.kubectl("get", "pods", "-n", "metallb-system", "-o", "name"); left != "" {
		m.Errorf("left of MetalLB: %s", left)
	}
	testbed.Until(m.T, "an answer at the address of the load balancer", func() error {
		ctx, cancel := context.WithTimeout(m.Context(), 2*time.Second)
		defer cancel()
		_, err := m.outside.Ask(ctx, svc.TCP, netip.MustParseAddrPort("192.168.77.200:80"))
		if err != nil {
			return fmt.Errorf("%w: %s", err, m.kubectl("get", "speakers,ipaddresspools.fairlead.dev", "-o", "yaml"))
		}
		return nil
	})
	if got := m.loadBalancer(); got != "192.168.77.200" {
		m.Errorf("the Service has the address %q", got)
	}
}

// loadBalancer is the address in the status of the Service.
func (m *migration) loadBalancer() string {
	m.Helper()
	return m.kubectl("get", "service", "web", "-o", "jsonpath={.status.loadBalancer.ingress[*].ip}")
}

// startMetalLB makes MetalLB's objects, and a Service with an address of its pool.
func (m *migration) startMetalLB() {
	m.Helper()
	var definitions strings.Builder
	for plural, kind := range map[string]string{
		"ipaddresspools": "v1beta1 IPAddressPool", "l2advertisements": "v1beta1 L2Advertisement", "bgpadvertisements": "v1beta1 BGPAdvertisement",
		"bgppeers": "v1beta2 BGPPeer", "communities": "v1beta1 Community", "bfdprofiles": "v1beta1 BFDProfile",
	} {
		version, kind, _ := strings.Cut(kind, " ")
		definitions.WriteString(strings.NewReplacer("PLURAL", plural, "KIND", kind, "VERSION", version).Replace(metallbDefinition))
	}
	m.apply(definitions.String())
	m.apply(metallbPrograms())
	m.apply(metallb)
	m.kubectl("patch", "service", "web", "-p", `{"spec":{"type":"LoadBalancer"}}`)
	m.kubectl("patch", "service", "web", "--subresource=status", "-p", `{"status":{"loadBalancer":{"ingress":[{"ip":"192.168.77.200"}]}}}`)
	m.kubectl("rollout", "status", "daemonset/speaker", "-n", "metallb-system", "--timeout=2m")
	m.kubectl("rollout", "status", "deployment/controller", "-n", "metallb-system", "--timeout=2m")
}
