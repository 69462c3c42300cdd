package watch

import (
	"encoding/json"
	"strings"
	"testing"
)

// redefine has every object of a resource read with other fields, of the same generations and versions, and ends the watches.
func (s *objectServer) redefine(resource string, fields *strings.Replacer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, e := range s.events {
		if e.resource == resource {
			s.events[i].Object = json.RawMessage(fields.Replace(string(e.Object)))
		}
	}
	s.redefined++
	close(s.changed)
	s.changed = make(chan struct{})
}

// A route that was written just after the definition of its kind was replaced is first read without the fields that only the new one
// has. Once it is read again with them, under the same generation, it is built again.
func TestDefinitionReplaced(t *testing.T) {
	t.Parallel()
	s := &objectServer{events: []objectEvent{{resource: "another"}}}
	update, changed := meshWatch(t, s)
	meshTargets(t, update, changed, -1, false)
	s.add(t, "httproutes", "ADDED", strings.Replace(meshedRoute, "rules: [{", "rules: [{filters: [{type: ExternalAuth}], ", 1))
	meshTargets(t, update, changed, 1, false)
	s.redefine("httproutes", strings.NewReplacer(`"type":"ExternalAuth"`,
		`"type":"ExternalAuth","externalAuth":{"protocol":"HTTP","http":{},"backendRef":{"name":"web","port":80}}`))
	meshTargets(t, update, changed, 2, false) // the authorization server is one
}
