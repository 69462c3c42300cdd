package web

import "github.com/fairlead/fairlead/internal/lb/proxied/compress"

// compressed is a body that is compressed on its way. What has come of it goes on as soon as nothing more is there, so that events of a
// stream do not wait for others.
type compressed struct {
	source
	to *compress.Encoder
	at int
}

func (c *compressed) next() (data []byte, last bool, err error) {
	for len(c.to.Bytes()) == 0 && !c.to.Closed() {
		switch data, _, err := c.source.next(); {
		case err != nil:
			return nil, false, err
		case len(data) > 0:
			if err := c.to.Write(data); err != nil {
				return nil, false, err
			}
			c.source.take()
		case c.source.done():
			if err := c.to.Close(); err != nil {
				return nil, false, err
			}
		default:
			if some, err := c.to.Flush(); !some || err != nil {
				return nil, false, err
			}
		}
	}
	c.at = len(c.to.Bytes())
	return c.to.Bytes(), false, nil
}

func (c *compressed) take() { c.to.Take(c.at) }

func (c *compressed) done() bool { return c.to.Closed() && len(c.to.Bytes()) == 0 }

func (c *compressed) sized() (uint64, bool) { return 0, false }
