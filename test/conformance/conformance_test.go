// Package conformance is the program of the conformance tests of the Gateway API. test/lb runs it against a cluster.
package conformance

import (
	"testing"

	"sigs.k8s.io/gateway-api/conformance"
)

func TestConformance(t *testing.T) { conformance.RunConformance(t) }
