module fixture.test/m

go 1.26.0
