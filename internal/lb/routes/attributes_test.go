package routes

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/bgp"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// Every field of a pool's route reaches the router that it is for, the length of the address's own family.
func TestAttributesOf(t *testing.T) {
	route := v1.PoolRoute{Peers: []string{"a"}, Communities: []string{"64512:7"}, LocalPreference: new(int64(300)), ASPathPrepend: 3,
		AggregationLengthV4: new(int32(24)), AggregationLengthV6: new(int32(64))}
	community, err := bgp.ParseCommunity("64512:7")
	if err != nil {
		t.Fatal(err)
	}
	for address, length := range map[string]int{"192.0.2.1": 24, "2001:db8::1": 64} {
		want := bgp.Attributes{Peers: []string{"a"}, Communities: []bgp.Community{community}, LocalPreference: new(uint32(300)),
			ASPathPrepend: 3, AggregationLength: length}
		got, err := attributesOf(&route, netip.MustParseAddr(address))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", address, got, err, want)
		}
	}
}
