package watch

import (
	"encoding/json"
	"strings"
	"testing"
)

// redefine has every object of a resource read with other fields, of the same generations and versions, and ends its watches: what
// they have missed is too old.
func (s *objectServer) redefine(resource string, fields *strings.Replacer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, e := range s.events {
		if e.resource == resource {
			s.events[i].Object = json.RawMessage(fields.Replace(string(e.Object)))
		}
	}
	s.events = append(s.events, objectEvent{})
	s.oldest = len(s.events)
	close(s.changed)
	s.changed = make(chan struct{})
}

// A route that was written just after the definition of its kind was replaced is first read without the fields that only the new one
// has. Once it is read again with them, under the same generation, it is built again.
func TestDefinitionReplaced(t *testing.T) {
	t.Parallel()
	s := &objectServer{}
	update, changed := meshWatch(t, s)
	s.add(t, "httproutes", "ADDED", strings.Replace(meshedRoute, "rules: [{", "rules: [{filters: [{type: ExternalAuth}], ", 1))
	meshTargets(t, update, changed, 1, false)
	s.redefine("httproutes", strings.NewReplacer(`"type":"ExternalAuth"`,
		`"type":"ExternalAuth","externalAuth":{"protocol":"HTTP","http":{},"backendRef":{"name":"web","port":80}}`))
	meshTargets(t, update, changed, 2, false) // the authorization server is one
}
