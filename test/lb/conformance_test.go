package lb

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway/api"
	gatewaycontroller "github.com/fairlead/fairlead/internal/gateway/controller"
	"github.com/fairlead/fairlead/internal/gateway/names"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// These choose which of the conformance tests of the Gateway API run, and what is kept of them (make conformance).
var (
	conformanceProfiles = flag.String("conformance-profiles", allProfiles, "the profiles of the conformance tests")
	conformanceRun      = flag.String("conformance-run", "", "run only the tests that match this pattern, without a report")
	conformanceReport   = flag.String("conformance-report", "", "the file for the report")
	conformanceLog      = flag.String("conformance-log", "", "the file for the output of the tests")
	conformanceChannel  = flag.String("conformance-channel", "on", "the channel of the kinds, as --gateway-api has it")
	meshReport          = flag.String("mesh-report", "", "the file for the report about meshes")
	meshLog             = flag.String("mesh-log", "", "the file for the output of the tests of meshes")
	conformanceVersion  = flag.String("conformance-version", "unknown", "the version in the report")
)

// allProfiles are the ones of Gateways. Those of meshes have their own test.
const allProfiles = "GATEWAY-HTTP,GATEWAY-GRPC,GATEWAY-TLS,GATEWAY-TCP,GATEWAY-UDP"

// All conformance tests of the Gateway API pass on a server and an agent as users start them. The backends are the published
// echo-basic, run as processes by --image-map; the tests run on a machine outside of the cluster.
func TestGatewayConformance(t *testing.T) {
	suite := process.BuildTest(t, "test/conformance", ".")
	echo := process.Build(t, "test/conformance", "sigs.k8s.io/gateway-api/conformance/echo-basic")
	dns := process.Build(t, "bench/peers/coredns", ".")
	c := newCluster(t, clusterOptions{server: []string{"--gateway-api", *conformanceChannel}, agent: []string{
		"--image-map", "registry.k8s.io/gateway-api/echo-basic=" + echo, "--image-map", "registry.k8s.io/coredns/coredns=" + dns,
	}}, "n1")
	c.staticPool()
	c.conforms(suite, *conformanceProfiles, *conformanceReport, *conformanceLog, "-test.timeout", "40m",
		"--usable-address", usableAddress, "--unusable-address", unusableAddress)
}

// The conformance tests of meshes pass, too. Their client is a program in a Pod.
func TestMeshConformance(t *testing.T) {
	suite := process.BuildTest(t, "test/conformance", ".")
	client := process.Build(t, "test/conformance", "./client")
	c := newCluster(t, clusterOptions{
		tools: filepath.Dir(client), agent: []string{"--image-map", "registry.k8s.io/gateway-api/echo-advanced=" + client},
	}, "n1")
	var features []string
	for _, f := range gatewaycontroller.MeshFeatures() {
		features = append(features, string(f.Name))
	}
	c.conforms(suite, "MESH-HTTP,MESH-GRPC", *meshReport, *meshLog, "-test.timeout", "20m",
		"--supported-features", strings.Join(features, ","))
}

// conforms runs the conformance tests of profiles. They pass, and leave no Pod.
func (c *cluster) conforms(suite, profiles, report, log string, more ...string) {
	c.Helper()
	client, err := api.NewClient(c.server.Config)
	c.must(err)
	awaitClass(c, client)
	args := append([]string{
		"-test.v", "--gateway-class", names.ClassName, "--conformance-profiles", profiles,
		"--namespace-labels", "pod-security.kubernetes.io/enforce=privileged",
		"--organization", "fairlead", "--project", "fairlead", "--url", "https://github.com/fairlead/fairlead",
		"--version", *conformanceVersion, "--contact", "https://github.com/fairlead/fairlead/issues",
	}, more...)
	switch {
	case *conformanceRun != "":
		args = append(args, "-test.run", "^TestConformance$/"+*conformanceRun)
	case report != "":
		args = append(args, "--report-output", report)
	}
	cmd := c.net.Outside("suite").Command(context.Background(), suite, args...)
	cmd.Dir, cmd.Env = c.TempDir(), append(os.Environ(), "KUBECONFIG="+c.server.KubeconfigAt(c, c.host.Addr4()))
	process.Conformance(c, cmd, log)
	testbed.Until(c, "the Pods of the tests to end", func() error {
		pods, err := c.client.CoreV1().Pods("").List(c.Context(), metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d are left, %s first", len(pods.Items), pods.Items[0].Name)
		}
		return err
	})
}

// Addresses for a Gateway: one that no other Gateway gets, and one of no pool.
const usableAddress, unusableAddress = "192.168.77.200", "203.0.113.9"

// staticPool makes the pool of usableAddress.
func (c *cluster) staticPool() {
	c.Helper()
	testbed.Until(c, "the kind of pools", func() error {
		_, err := c.lb.Pools.Create(c.Context(), &v1.IPAddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: "static"},
			Spec:       v1.IPAddressPoolSpec{Addresses: []string{usableAddress + "/32"}, AutoAssign: new(false)},
		}, metav1.CreateOptions{})
		return err
	})
}
