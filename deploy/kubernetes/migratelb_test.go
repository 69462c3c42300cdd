package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
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

// metallbPrograms have the kinds, names and labels of MetalLB's manifest.
func metallbPrograms() string {
	const namespace, labels = "metallb-system", "app: metallb, component: "
	var out strings.Builder
	for plural, kind := range map[string]string{
		"ipaddresspools": "v1beta1 IPAddressPool", "l2advertisements": "v1beta1 L2Advertisement", "bgpadvertisements": "v1beta1 BGPAdvertisement",
		"bgppeers": "v1beta2 BGPPeer", "communities": "v1beta1 Community", "bfdprofiles": "v1beta1 BFDProfile",
	} {
		version, kind, _ := strings.Cut(kind, " ")
		out.WriteString(strings.NewReplacer("PLURAL", plural, "KIND", kind, "VERSION", version).Replace(metallbDefinition))
	}
	return out.String() + metallbAccount +
		placeholder("Deployment", namespace, "controller", labels+"controller", "serviceAccountName: metallb") + "---" +
		placeholder("DaemonSet", namespace, "speaker", labels+"speaker",
			"serviceAccountName: metallb, hostNetwork: true, nodeSelector: {kubernetes.io/os: linux}")
}

// balanced is the address of the Service with MetalLB.
const balanced = "192.168.77.200"

// metallb changes the cluster from MetalLB to fairlead lb and back with the commands of docs/kubernetes.md, and then with the commands of
// docs/loadbalancer.md. MetalLB's objects and the address of the Service are real; its programs do not run here. The Service keeps its
// address, and MetalLB's objects are the same afterwards.
func (m *migration) metallb() {
	m.Helper()
	m.startMetalLB()
	objects := func() string {
		return m.kubectl("get", "daemonset/speaker", "deployment/controller", "-n", "metallb-system", "-o",
			`jsonpath={range .items[*]}{.spec}{.metadata.annotations.fairlead\.dev/lb}{end}`) + m.service("{.metadata.finalizers} {.status}")
	}
	before := objects()
	for _, command := range migrateCommands(m.T, "MetalLB") {
		if strings.HasPrefix(command, "apply") {
			m.interruptedLB()
		}
		out := m.must(strings.Fields(command)...)
		if got := m.service("{.status.loadBalancer.ingress[*].ip}"); got != balanced {
			m.Errorf("%s: the Service has the address %q\n%s", command, got, out)
		}
		switch verb, _, _ := strings.Cut(command, " "); verb {
		case "plan":
			if !strings.Contains(out, "DaemonSet metallb-system/speaker") || !strings.Contains(out, "addresses of Services that are taken over: 1") {
				m.Errorf("the plan is\n%s", out)
			}
		case "apply":
			m.checkApplied()
		case "verify", "status":
			if !strings.Contains(out, "fairlead") {
				m.Errorf("%s: %s", command, out)
			}
		}
	}
	if after := objects(); after != before {
		m.Errorf("MetalLB's objects are\n%s\nand were\n%s", after, before)
	}
	left := m.kubectl("get", "ipaddresses,secrets,configmaps,leases,ingressclasses,customresourcedefinitions", "-A", "-o", "name")
	for _, name := range []string{balanced, "fairlead-lb", "ingressclass", "ipaddresspools.fairlead.dev"} {
		if strings.Contains(left, name) {
			m.Errorf("left of fairlead lb is %s: %s", name, left)
		}
	}
	m.metallbByHand()
}

// metallbByHand changes the cluster with the commands of docs/loadbalancer.md.
func (m *migration) metallbByHand() {
	m.Helper()
	steps := blocks(section(m.T, "loadbalancer.md", "From MetalLB"))
	if len(steps) != 2 {
		m.Fatalf("the section has the commands %q", steps)
	}
	m.shell(steps...)
	for _, verb := range []string{"apply", "rollback", "verify"} {
		out, err := m.migrate(verb, "--component", "lb")
		if err == nil || !strings.Contains(err.Error()+out, "was not installed by 'fairlead migrate'") {
			m.Errorf("%s of what was installed by hand: %v\n%s", verb, err, out)
		}
	}
	m.answers()
}

// answers waits for an answer of fairlead lb at the address.
func (m *migration) answers() {
	m.Helper()
	if left := m.kubectl("get", "pods", "-n", "metallb-system", "-o", "name"); left != "" {
		m.Errorf("left of MetalLB: %s", left)
	}
	if got := m.service("{.status.loadBalancer.ingress[*].ip}"); got != balanced {
		m.Errorf("the Service has the address %q", got)
	}
	testbed.Until(m.T, "an answer at the address of the load balancer", func() error {
		ctx, cancel := context.WithTimeout(m.Context(), 2*time.Second)
		defer cancel()
		_, err := m.outside.Ask(ctx, svc.TCP, netip.MustParseAddrPort(balanced+":80"))
		if err != nil {
			return fmt.Errorf("%w: %s", err, m.kubectl("get", "speakers,ipaddresspools.fairlead.dev", "-o", "yaml"))
		}
		return nil
	})
}

// checkApplied checks that only fairlead lb announces, and that the way back hurts nothing that MetalLB does not know.
func (m *migration) checkApplied() {
	m.Helper()
	m.answers()
	m.apply("apiVersion: fairlead.dev/v1\nkind: IPAddressPool\nmetadata: {name: later}\nspec: {addresses: [192.168.77.220/32]}\n")
	out, err := m.migrate("rollback", "--component", "lb")
	if err == nil || !strings.Contains(err.Error()+out, "the IPAddressPool later of fairlead.dev is not MetalLB's") {
		m.Errorf("rollback with another pool: %v\n%s", err, out)
	}
	m.kubectl("delete", "ipaddresspools.fairlead.dev", "later")
}

// interruptedLB kills 'apply' as soon as MetalLB's controller is being ended; the next 'apply' goes on.
func (m *migration) interruptedLB() {
	m.Helper()
	p := process.Start(m.T, exec.Command(process.Program("fairlead"), "migrate", "apply", "--component", "lb",
		"--kubeconfig", m.api.Kubeconfig))
	testbed.Until(m.T, "the end of MetalLB's controller", func() error {
		if p.Ended() {
			m.Fatalf("apply has ended:\n%s", p.Log())
		}
		if m.kubectl("get", "deployment", "controller", "-n", "metallb-system", "-o", "jsonpath={.spec.replicas}") != "0" {
			return errors.New("it is not being ended")
		}
		return nil
	})
	p.Kill()
}

// service returns fields of the Service.
func (m *migration) service(path string) string {
	m.Helper()
	return m.kubectl("get", "service", "web", "-o", "jsonpath="+path)
}

// startMetalLB makes MetalLB's objects, and a Service with an address of its pool.
func (m *migration) startMetalLB() {
	m.Helper()
	m.apply(metallbPrograms())
	m.apply(metallb)
	m.kubectl("patch", "service", "web", "-p", `{"spec":{"type":"LoadBalancer"}}`)
	m.kubectl("patch", "service", "web", "--subresource=status", "-p", `{"status":{"loadBalancer":{"ingress":[{"ip":"`+balanced+`"}]}}}`)
	m.kubectl("rollout", "status", "daemonset/speaker", "-n", "metallb-system", "--timeout=2m")
	m.kubectl("rollout", "status", "deployment/controller", "-n", "metallb-system", "--timeout=2m")
}
