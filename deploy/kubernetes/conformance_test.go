package kubernetes

import (
	"context"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// conformanceLog and conformanceRun are as in test/lb.
var (
	conformanceLog = flag.String("conformance-log", "", "the file for the output of the conformance tests of the Gateway API")
	conformanceRun = flag.String("conformance-run", "", "run only the conformance tests that match this pattern")
)

// onKubernetes skips a test whose subject is the real control plane of Kubernetes.
func onKubernetes(t *testing.T) {
	t.Helper()
	if !process.Kubernetes() {
		t.Skip("'make kubernetes-test' builds the real kube-apiserver and runs this test on it")
	}
}

// frontRights let fairlead lb read what Gateways name; a cluster has narrower Roles (docs/loadbalancer.md).
const frontRights = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: fairlead-lb-certificates}
rules: [{apiGroups: [""], resources: [secrets, configmaps], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: fairlead-lb-certificates}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: fairlead-lb-certificates}
subjects: [{kind: ServiceAccount, name: fairlead-lb, namespace: kube-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: suite}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: suite, namespace: kube-system}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: suite, namespace: kube-system}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system}
data:
  config.conf: |-
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}
    clusterCIDR: 10.244.0.0/16
  kubeconfig.conf: |-
` + kubeconfigOfPods

// gatewayPools has a pool of addresses for all Gateways, and one with the address that the suite asks for.
const gatewayPools = `
apiVersion: fairlead.dev/v1
kind: IPAddressPool
metadata: {name: default}
spec: {addresses: [192.168.77.100-192.168.77.199]}
---
apiVersion: fairlead.dev/v1
kind: IPAddressPool
metadata: {name: static}
spec: {addresses: [192.168.77.200/32], autoAssign: false}
`

// All conformance tests of the Gateway API for Gateways pass on a real Kubernetes with the manifests of fairlead proxy and fairlead lb,
// and with their rights. The kinds of fairlead are described by kubectl.
func TestGatewayConformanceOnKubernetes(t *testing.T) {
	onKubernetes(t)
	suite := process.BuildTest(t, "test/conformance", ".")
	network := testbed.NewNetwork(t)
	r := &rig{T: t, node: network.Host("node1"), node2: network.Host("node2")}
	r.connect()
	r.api.RunWorkloads(t)
	startKubelet(r, map[string]string{
		"fairlead/fairlead:0.1.0": process.Program("fairlead"), "registry.k8s.io/coredns/coredns:v1.12.2": peer(t, "coredns"),
		"registry.k8s.io/gateway-api/echo-basic": process.Build(t, "test/conformance", "sigs.k8s.io/gateway-api/conformance/echo-basic"),
	}, r.node2)
	r.register(r.node)
	r.register(r.node2)
	r.apply(strings.ReplaceAll(frontRights, "SERVER", r.gateway.URL))
	r.kubectl("apply", "-f", "proxy.yaml", "-f", "lb.yaml")
	for _, name := range []string{"fairlead-proxy", "fairlead-lb"} {
		r.kubectl("rollout", "status", "daemonset/"+name, "-n", "kube-system", "--timeout=2m")
	}
	r.apply(gatewayPools)
	r.checkExplained()
	testbed.Until(t, "the GatewayClass", func() error {
		out, err := process.Try(r.kubectlCommand("get", "gatewayclass", "fairlead", "-o", "jsonpath={.status}"))
		if err == nil && !strings.Contains(out, "supportedFeatures") {
			err = errors.New(out)
		}
		return err
	})
	args := []string{
		"-test.v", "-test.timeout", "40m", "--gateway-class", "fairlead",
		"--conformance-profiles", "GATEWAY-HTTP,GATEWAY-GRPC,GATEWAY-TLS,GATEWAY-TCP,GATEWAY-UDP",
		"--usable-address", "192.168.77.200", "--unusable-address", "203.0.113.9",
	}
	if *conformanceRun != "" {
		args = append(args, "-test.run", "^TestConformance$/"+*conformanceRun)
	}
	file := t.TempDir() + "/kubeconfig"
	if err := r.kubeconfig(file, r.token("suite", "node1", "")); err != nil {
		t.Fatal(err)
	}
	cmd := network.Outside("suite").Command(context.Background(), suite, args...)
	cmd.Dir, cmd.Env = t.TempDir(), append(os.Environ(), "KUBECONFIG="+file)
	process.Conformance(t, cmd, *conformanceLog)
	testbed.Until(t, "the Pods of the tests to end", func() error {
		pods, err := r.client.CoreV1().Pods(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{LabelSelector: "!app.kubernetes.io/name"})
		if err == nil && len(pods.Items) > 0 {
			err = errors.New(pods.Items[0].Name + " is left")
		}
		return err
	})
}

// checkExplained asks kubectl to explain the kinds of fairlead and to describe an object of one.
func (r *rig) checkExplained() {
	r.Helper()
	for kind, want := range map[string]string{
		"ipaddresspools.fairlead.dev": "addresses\t<[]string>", "bgppeers.fairlead.dev": "peerASN\t<integer>",
		"speakers.fairlead.dev": "status\t<Object>", "gateways.gateway.networking.k8s.io": "listeners\t<[]Object>",
	} {
		testbed.Until(r.T, "the explanation of "+kind, func() error {
			out, err := process.Try(r.kubectlCommand("explain", kind, "--recursive"))
			if err == nil && (!strings.Contains(out, want) || !strings.Contains(out, "DESCRIPTION:")) {
				err = errors.New(out)
			}
			return err
		})
	}
	if out := r.kubectl("describe", "ipaddresspool", "default"); !strings.Contains(out, "192.168.77.100-192.168.77.199") {
		r.Errorf("kubectl describe: %s", out)
	}
}
