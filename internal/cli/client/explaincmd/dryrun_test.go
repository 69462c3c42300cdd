package explaincmd

import (
	"strings"
	"testing"
)

// Two states of an object are refused for kubectl apply. For kubectl delete only the name counts, and the second is gone by then.
func TestTwins(t *testing.T) {
	const first = "{apiVersion: v1, kind: Service, metadata: {name: twin, namespace: shop}, spec: {ports: [{port: 80}]}}"
	manifest := first + "\n---\n" + strings.Replace(first, "80", "81", 1)
	if _, err := readObjects(strings.NewReader(manifest), "-", "shop", false); err == nil || !strings.Contains(err.Error(), "differs") {
		t.Errorf("two states: %v", err)
	}
	all, err := readObjects(strings.NewReader(manifest), "-", "shop", true)
	if err != nil || len(all) != 2 || all[0].again || !all[1].again {
		t.Errorf("to be deleted: %v, %v", all, err)
	}
}
