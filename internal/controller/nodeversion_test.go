package controller

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A Node whose agent is more than a minor version from the server gets an Event, once; others get none.
func TestVersionSkew(t *testing.T) {
	r := newRig(t)
	for name, version := range map[string]string{"early": "v1.1.0", "near": "v1.2.0", "same": "v1.3.4", "late": "v1.5.0"} {
		r.node(name, func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = version })
	}
	r.run(Options{Controllers: []string{NodeLifecycleName}, Version: "v1.3.0"})
	want := map[string]string{
		"early": "the agent is v1.1.0, the server v1.3.0: not tested together, at most 1 minor version apart is; upgrade the agent",
		"late":  "the agent is v1.5.0, the server v1.3.0: not tested together, at most 1 minor version apart is; upgrade the server",
	}
	r.eventually("Events of both", func() error {
		list, err := r.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{FieldSelector: "reason=VersionSkew"})
		if err != nil {
			return err
		}
		got := map[string]string{}
		for i := range list.Items {
			got[list.Items[i].InvolvedObject.Name] = list.Items[i].Message
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || len(list.Items) != len(want) {
			return fmt.Errorf("the Events are %v", got)
		}
		return nil
	})
}
